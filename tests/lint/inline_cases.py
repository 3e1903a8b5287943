"""Cases about Python in the script, sh, containers and servers: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE

SH_JOB = "#!/bin/sh\n#SBATCH --gpus=1\n"
INLINE: list[tuple[str, str, int, str]] = [
    ("broken-line", ONE + "python -c 'print(\\\"a\\\")'\n", 7, "error"),
    ("broken-line", ONE + "srun python3 -c 'import torch; print(torch.ones(2)'\n", 7, "error"),
    ("broken-line", ONE + 'python -c "\nimport os\nif os.name\n  print(1)\n"\n', 9, "error"),
    ("broken-line", ONE + 'python -c "\n  import os\n  print(1)\n"\n', 8, "warning"),
    ("broken-line", ONE + "A=$(python -c 'print((1)')\npython x.py $A\n", 7, "error"),
    ("broken-line", ONE + 'python -c "import os; print(\\"ok\\")"\n', 0, ""),
    ("broken-line", ONE + "python -c 'print(\"a\")'\npython2 -c 'print 1'\npython -c 'print 1'\n", 0, ""),
    ("broken-line", ONE + 'python -c "print($A"\npython -c "$CODE"\npython x.py -c "not Python"\n', 0, ""),
    (
        "broken-line",
        ONE + 'ssh a python -c \'print(\\"a\\")\'\nbash -c "python -c \'print(\\\\\\"a\\\\\\")\'"\n',
        0,
        "",
    ),
    ("broken-line", ONE + "python -c '\nfor i in range(2):\n    print(i)\n'\n", 0, ""),
]
SOURCED: list[tuple[str, str, int, str]] = [
    ("other-shell", SH_JOB + ". settings.sh\npython x.py\n", 3, "warning"),
    ("other-shell", SH_JOB + "source settings.sh\npython x.py\n", 3, "warning"),
    ("other-shell", SH_JOB + ". ./settings.sh\n. activate me\n. $HOME/a.sh\n", 0, ""),
    ("other-shell", SH_JOB + "export PATH=.:$PATH\n. settings.sh\n", 0, ""),
    ("other-shell", SH_JOB + "export PATH=$PATH:$PWD\n. settings.sh\n", 0, ""),
    ("other-shell", SH_JOB.replace("sh\n", "bash\n", 1) + ". settings.sh\n", 0, ""),
    ("other-shell", SH_JOB + "bash -c '. settings.sh'\n", 0, ""),
]
CONTAINERS: list[tuple[str, str, int, str]] = [
    ("container-without-gpu", ONE + "singularity exec -B $SCRATCH:/data /home/u/a.sif python x.py\n", 7, "warning"),
    ("container-without-gpu", ONE + "apptainer exec --bind $A:$B ~/a.sif python x.py --lr $LR\n", 7, "warning"),
    ("container-without-gpu", ONE + "singularity exec $OPTIONS -B $SCRATCH:/data /home/u/a.sif python x.py\n", 0, ""),
    ("container-without-gpu", ONE + "singularity exec -B $SCRATCH $FLAGS /home/u/a.sif python x.py\n", 0, ""),
    ("container-without-gpu", ONE + "singularity exec --nv -B $SCRATCH /home/u/a.sif python x.py\n", 0, ""),
    ("not-exported", ONE + "SINGULARITY_BIND=/data\nsingularity exec --nv a.sif python x.py\n", 7, "error"),
    ("not-exported", ONE + "APPTAINERENV_HF_HOME=/data\napptainer exec --nv a.sif python x.py\n", 7, "error"),
    ("not-exported", ONE + "NVTE_FLASH_ATTN=0\npython x.py\n", 7, "error"),
    ("not-exported", ONE + "ACCELERATE_USE_DEEPSPEED=true\npython x.py\n", 7, "error"),
    ("not-exported", ONE + "ACCELERATE_USE_DEEPSPEED=false\npython x.py\n", 0, ""),
    (
        "not-exported",
        ONE + "SINGULARITY_BIND=/data\nsingularity exec --nv -B $SINGULARITY_BIND a.sif python x.py\n",
        0,
        "",
    ),
    ("not-exported", ONE + "VLLM_PID=3\nSINGULARITY_MODULE=a\npython x.py\n", 0, ""),
    ("no-terminal", ONE + "docker run -it image python x.py\n", 7, "error"),
    ("no-terminal", ONE + "if [ -t 1 ]; then\n  docker run -it image python x.py\nfi\n", 0, ""),
]
SERVERS: list[tuple[str, str, int, str]] = [
    ("blocks-script", ONE + "vllm serve model --port 8000\npython eval.py\n", 7, "warning"),
    ("blocks-script", ONE + "python -m vllm.entrypoints.openai.api_server --model m\npython eval.py\n", 7, "warning"),
    ("blocks-script", ONE + "python -m llava.serve.controller --port 1 &\npython -m llava.serve.model_worker\npython eval.py\n", 8, "warning"),
    ("blocks-script", ONE + "vllm serve model &\npython eval.py\n", 0, ""),
    ("blocks-script", ONE + "vllm bench serve\ntimeout 10m vllm serve model\nollama pull m\npython eval.py\n", 0, ""),
    ("blocks-script", ONE + "python eval.py\nvllm serve model\n", 0, ""),
    ("exit-zero", ONE + 'if [ $# -ne 2 ]; then\n  echo "Illegal number of arguments"\n  exit 0\nfi\n', 9, "warning"),
    ("exit-zero", ONE + 'if [ $# -ne 2 ]; then\n  printf "Not enough arguments\\n"\n  exit 0\nfi\n', 9, "warning"),
    ("exit-zero", ONE + 'if [ -f done ]; then\n  echo "Already trained"\n  exit 0\nfi\n', 0, ""),
    ("array-not-used", ONE.replace("#SBATCH --nodes=1", "#SBATCH --array=1-2") + "date\npython x.py --save_path=/a\n", 2, "warning"),
    ("array-not-used", ONE.replace("#SBATCH --nodes=1", "#SBATCH --array=1-2") + "N=$(date +%s)\npython x.py --save_path=/a\n", 0, ""),
]  # fmt: skip
PYXIS = (
    ONE.replace("--nodes=1", "--nodes=2")
    + "srun --container-image=a.sqsh bash -c 'torchrun --nnodes=2 --rdzv_endpoint=$MASTER_ADDR:29500 x.py'\n"
)
SUBMITTED = '#!/bin/bash\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --gpus=1\nexport WANDB_API_KEY="{}"\npython x.py $WANDB_API_KEY\nEOF\n'
PASSED_ON: list[tuple[str, str, int, str]] = [
    ("expanded-too-early", SUBMITTED.format("$WANDB_API_KEY"), 0, ""),
    ("expanded-too-early", SUBMITTED.format("${WANDB_API_KEY}"), 0, ""),
    ("expanded-too-early", SUBMITTED.format("abc"), 6, "error"),
    ("unset-variable", PYXIS, 0, ""),
    ("unset-variable", PYXIS.replace("--container-image=a.sqsh ", ""), 7, "warning"),
    ("one-log-for-array", ONE + "#SBATCH --array=1-1%1\n#SBATCH --output=%A.out\npython x.py\n", 0, ""),
    ("one-log-for-array", ONE + "#SBATCH --array=3-3\n#SBATCH --output=a.out\npython x.py\n", 0, ""),
]
FRACTIONS: list[tuple[str, str, int, str]] = [
    ("test-syntax", ONE + "LR=$((64 * 0.001))\npython x.py --lr $LR\n", 7, "error"),
    ("test-syntax", ONE + "A=0.5\nN=$(( 8 * A ))\npython x.py --n $N\n", 8, "error"),
    ("test-syntax", ONE + "A=0.5\npython x.py --n $((8 * $A))\n", 8, "error"),
    (
        "test-syntax",
        ONE + "A=2\nB=v1.5\nN=$((8 * A))\nM=$(echo '8 * 0.5' | bc)\n# $((1 * 0.5))\npython x.py $N $M $B\n",
        0,
        "",
    ),
    ("test-syntax", ONE + "awk '{print $((1 * 0.5))}' f\nA=0.5\nA=2\npython x.py $((8 * A))\n", 0, ""),
]
INLINE_CASES = [*FRACTIONS, *PASSED_ON, *INLINE, *SOURCED, *CONTAINERS, *SERVERS]
