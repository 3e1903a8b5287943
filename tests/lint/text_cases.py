"""Cases about lost results, texts for other shells and programs, and names in longer words: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

HEAD = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"
CHECK = "if [ $? -ne 0 ]; then\n  exit 1\nfi\n"
PBS = "#!/bin/bash\n#PBS -l select=1\n"

STATUS: list[tuple[str, str, int, str]] = [
    ("exit-code-lost", HEAD + "python prepare.py & rc=$?\nwait\nif [ $rc -ne 0 ]; then exit $rc; fi\n", 4, "warning"),
    ("exit-code-lost", HEAD + "srun python serve.py &\n" + CHECK + "kill %1\n", 5, "warning"),
    (
        "exit-code-lost",
        HEAD + "for h in a b; do\n  ssh $h ls &\n  p+=($!); r+=($?)\ndone\nwait ${p[@]}; exit ${r[0]}\n",
        6,
        "warning",
    ),
    ("exit-code-lost", HEAD + "ls &\nwait $!\nrc=$?\nexit $rc\n", 0, ""),
    ("exit-code-lost", HEAD + "ls &\nP=$!\nmkdir x\nrc=$?\nexit $rc\n", 0, ""),
    ("exit-code-lost", HEAD + "f() {\n  local out=$(python pick.py)\n  " + CHECK + "}\nf\n", 6, "warning"),
    ("exit-code-lost", HEAD + "export OUT=$(python pick.py) || exit 1\n", 4, "warning"),
    ("exit-code-lost", HEAD + "OUT=$(python pick.py) || exit 1\nexport N=$((3 + 1)) M=2\nOUT=$(ls)\n" + CHECK, 0, ""),
    ("exit-zero", HEAD + '[ -d data ] || { echo "no data"; exit $?; }\n' + TRAIN, 4, "warning"),
    ("exit-zero", HEAD + '[[ ! -d data ]] && echo "ERROR: no data" && exit $?\n' + TRAIN, 4, "warning"),
    (
        "exit-zero",
        HEAD
        + "mkdir x || exit $?\ncd x && echo fine && exit $?\nmkdir y; rc=$?\n[ $rc -ne 0 ] && echo error && exit $rc\n",
        0,
        "",
    ),
    ("exit-zero", HEAD + "trap 'rm -rf tmp; exit 0' EXIT\n" + TRAIN, 4, "warning"),
    ("exit-zero", HEAD + "end() {\n  rm -rf tmp\n  exit 0\n}\ntrap end EXIT\n" + TRAIN, 6, "warning"),
    ("exit-zero", HEAD + "end() {\n  rc=$?\n  exit $rc\n}\ntrap end EXIT\ntrap 'exit 0' TERM\n" + TRAIN, 0, ""),
    ("lost-in-subshell", HEAD + "(\npython train.py || exit 1\n) 2>&1 | tee log\n", 5, "warning"),
    ("lost-in-subshell", HEAD + "{\npython train.py || exit 1\n} | tee log\n", 5, "warning"),
    ("lost-in-subshell", HEAD + "for s in 1 2; do\n  python train.py $s || exit 1\ndone | tee log\n", 5, "warning"),
    (
        "lost-in-subshell",
        HEAD + "cat l | while read x; do\n  python a.py $x || exit 1\ndone\npython b.py\n",
        5,
        "warning",
    ),
    ("lost-in-subshell", HEAD + "cat l | while read x; do\n  python a.py $x || exit 1\ndone\n", 0, ""),
    (
        "lost-in-subshell",
        HEAD + "cat l | while read x; do\n  python a.py $x || exit 1\ndone || exit 1\npython b.py\n",
        0,
        "",
    ),
    ("lost-in-subshell", HEAD + "set -o pipefail\n{\npython train.py || exit 1\n} | tee log\n", 0, ""),
    ("lost-in-subshell", HEAD + 'srun bash -c "cd /scratch/x"\nsrun python train.py\n', 4, "warning"),
    ("lost-in-subshell", HEAD + "ssh $h cd /w && python train.py\n", 4, "warning"),
    (
        "lost-in-subshell",
        HEAD + "for h in a b; do\n  ssh -q $h \\\n    module load x;\n  torchrun a.py &\ndone\nwait\n",
        5,
        "warning",
    ),
    (
        "lost-in-subshell",
        HEAD + 'if ssh h cd /x; then ls; fi\nssh h cd /x || exit 1\nssh h "cd /w && ls"\nssh h "source run.sh"\n'
        'srun bash -c "cd /w; ls"\nsingularity exec --pwd cd x.sif ls\n' + TRAIN,
        0,
        "",
    ),
    ("out-of-place", HEAD + "run() {\n  srun python train.py\n}\n", 4, "error"),
    ("out-of-place", HEAD + "run() {\n  srun python train.py\n}\nrnu\n", 4, "error"),
    ("out-of-place", HEAD + "run() {\n  srun python train.py\n}\nmain() {\n  run\n}\nmain\n", 0, ""),
    ("out-of-place", HEAD + 'run() {\n  srun python train.py\n}\n"$1"\n', 0, ""),
    ("endless-wait", HEAD + "nohup python train.py > log &\ntail -f log\n", 5, "warning"),
    ("endless-wait", HEAD + "vllm serve x &  # no kill\npython train.py\n# kill %1\nwait\n", 7, "warning"),
    (
        "endless-wait",
        HEAD + "ray start --head --block &\nray start --address=$A --block &\nbash train.sh\nwait\n",
        7,
        "warning",
    ),
    ("endless-wait", HEAD + "ray start --head --block &\nray start --address=$A --block &\nwait\n", 0, ""),
    ("endless-wait", HEAD + "vllm serve x &\npython train.py\nkill %1  # it ends\nwait\n", 0, ""),
    ("exit-code-lost", HEAD + "# without pipefail and PIPESTATUS\nset -e\npython train.py | tee log\n", 6, "warning"),
    ("endless-wait", HEAD + "python train.py > log &\ntail -f --pid=$! log\n", 0, ""),
    ("endless-wait", HEAD + "python api_server.py > log &\ntail -f log\n", 0, ""),
]
TEXTS: list[tuple[str, str, int, str]] = [
    ("literal-quotes", HEAD + 'CMD="cd /w && python train.py"\n$CMD\n', 5, "warning"),
    ("literal-quotes", HEAD + 'CMD="python train.py > log 2>&1"\nsrun $CMD\n', 5, "warning"),
    ("literal-quotes", HEAD + 'CMD="A=0 python train.py"\n$CMD\n', 5, "warning"),
    (
        "literal-quotes",
        HEAD + 'CMD="A=0 python train.py > x"\neval $CMD\nbash -c "$CMD"\necho $CMD\nssh h $CMD\n',
        0,
        "",
    ),
    ("variable-not-expanded", HEAD + "N=3\nX=$(awk 'NR==$N' list)\n", 5, "error"),
    ("variable-not-expanded", HEAD + "X=$(sed -n '${SLURM_ARRAY_TASK_ID}p' list)\n", 4, "error"),
    ("variable-not-expanded", HEAD + "LR=1\nsed -i 's/lr: .*/lr: $LR/' conf.yaml\n", 5, "error"),
    (
        "variable-not-expanded",
        HEAD + "i=3\nX=$(awk '{i=3; print $i}' f)\nsed -i 's/\\${X}/1/' c.yaml\nsed -i 's/a/$X/' job.sh\nsed '$d' f\n"
        "awk -v n=$X 'NR==n {print $NF}' f\nsed -n \"${X}p\" f\n",
        0,
        "",
    ),
    ("broken-line", HEAD + "bash -c cd /w\n", 4, "error"),
    ("broken-line", HEAD + "srun bash -c source env.sh && python train.py\n", 4, "error"),
    ("broken-line", HEAD + "ssh h bash -c 'cd /w; python train.py'\n", 4, "error"),
    ("broken-line", HEAD + 'srun bash -c "python train.py $@"\n', 4, "error"),
    ("broken-line", HEAD + 'bash -c "source env; python train.py "$@""\n', 4, "error"),
    (
        "broken-line",
        HEAD
        + 'ssh h "bash -c \'cd /w; ls\'"\nbash -c \'python train.py "$@"\' _ "$@"\nbash -c "$CMD" x y\nbash -c "ls $*"\n',
        0,
        "",
    ),
    ("pattern-not-expanded", HEAD + 'rm -rf "$OUT/*"\n', 4, "warning"),
    ("pattern-not-expanded", HEAD + "cp 'data/*.tar' /tmp\n", 4, "warning"),
    (
        "pattern-not-expanded",
        HEAD + "cp \"$D\"/*.tar x\nscp \"h:data/*\" .\nfind . -name '*.py'\nssh h 'rm -rf x/*'\n",
        0,
        "",
    ),
    ("constant-condition", HEAD + "if [[ -e ckpt/*.pt ]]; then\n  R=1\nfi\n", 4, "warning"),
    ("constant-condition", HEAD + 'if [ -f "$D/*.pt" ]; then\n  R=1\nfi\n', 4, "warning"),
    (
        "constant-condition",
        HEAD + '[[ -d $* ]] && ls\n[ -f $D/*.pt ] && ls\n[[ -f "$D/x.pt" ]] && ls *.pt\n[[ -n "$(ls *.pt)" ]]\n',
        0,
        "",
    ),
    ("missing-colon", HEAD + "export PATH=/opt/x/bin\nmkdir x\n", 4, "error"),
    (
        "missing-colon",
        HEAD + "export PATH=/opt/x/bin:$PATH\nPATH=/env/bin python x.py\nPATH=/opt/bin:/usr/bin\nmkdir x\n",
        0,
        "",
    ),
    ("directive-refused", PBS + "#PBS ngpus=1\n" + TRAIN, 3, "error"),
    ("directive-refused", PBS + "#PBS -N a=b\n" + TRAIN, 0, ""),
    ("unset-variable", HEAD + "MODEL=x\npython train.py --out runs/$MODEL_base\n", 5, "warning"),
    ("unset-variable", HEAD + "model=x\nlr=1\npython train.py --name $model_lr$lr\n", 6, "warning"),
    ("unset-variable", HEAD + "for d in a b; do\n  python train.py --out out_$d_s1\ndone\n", 5, "warning"),
    ("unset-variable", HEAD + "MODEL=x\npython train.py --out ${MODEL}_base $MODEL/x_y\n", 0, ""),
]
TEXT_CASES = [*STATUS, *TEXTS]
