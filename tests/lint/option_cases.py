"""Cases about options of launchers, subcommands and names without $: the rule, the script, the line, the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE

BARE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\n"  # 3 lines
TRAIN = "python train.py\n"

LAUNCH: list[tuple[str, str, int, str]] = [
    ("launcher-option", ONE + "accelerate launch --nproc_per_node 4 x.py\n", 7, "error"),
    ("launcher-option", ONE + "deepspeed --nproc_per_node 4 x.py\n", 7, "error"),
    ("launcher-option", ONE + "torchrun --num-gpus=4 x.py\n", 7, "error"),
    ("launcher-option", ONE + "torchrun x.py --nproc_per_node=4\n", 7, "error"),
    ("launcher-option", ONE + "accelerate launch x.py --num_processes 4\n", 7, "error"),
    ("launcher-option", ONE + "torchrun --nproc_per_node=4 python x.py\n", 7, "error"),
    ("launcher-option", ONE + "accelerate train.py\n", 7, "error"),
    ("launcher-option", ONE + "accelerate launch --multi_gpu --num_processes 4 x.py --nnodes 1\n", 0, ""),
    ("launcher-option", ONE + "torchrun --nproc_per_node=4 x.py --num_processes 8 --nproc_per_node 4\n", 0, ""),
    ("launcher-option", ONE + "torchrun --nproc_per_node=4 --no_python python x.py\n", 0, ""),
    ("launcher-option", ONE + "torchrun --standalone $ARGS x.py --nproc_per_node 4\n", 0, ""),
    ("launcher-option", ONE + "deepspeed --num_gpus 4 --module x.y --num_processes 4\naccelerate env\n", 0, ""),
]
FIRST_ONLY = (
    "srun python x.py $A\n",
    'srun torchrun --nproc_per_node=4 x.py "${A}" --seed 1\n',
    "mpirun -np 4 ./a.out $A\n",
    'srun bash -c "python x.py $A"\n',
    'C="python x.py $A"\n$C\n',
    'python x.py "${A[*]}"\n',
)
ALL_ELEMENTS = (
    'srun python x.py "${A[@]}"\n',
    "srun python x.py ${A[*]}\n",
    'bash -c "python x.py ${A[*]}"\n',
    'sbatch --wrap "${A[*]}"\n',
    'echo "$A" ${#A[@]}\n',
    'C="python x.py ${A[*]}"\n$C\n',
)
HF = "python x.py --per_device_train_batch_size 4 --load_best_model_at_end "
SETTINGS: list[tuple[str, str, int, str]] = [
    ("launcher-option", BARE + HF + "--eval_strategy epoch --save_strategy steps\n", 4, "error"),
    ("launcher-option", BARE + HF + "True --evaluation_strategy=epoch\n", 4, "error"),
    ("launcher-option", BARE + HF + "--eval_strategy steps --eval_steps 200 --save_steps 500\n", 4, "error"),
    ("launcher-option", BARE + HF + "--eval_strategy steps --eval_steps 250 --save_steps 500\n", 0, ""),
    ("launcher-option", BARE + HF + "False --eval_strategy epoch --save_strategy steps\n", 0, ""),
    ("launcher-option", BARE + HF + "--eval_strategy epoch --save_strategy best\n", 0, ""),
    ("launcher-option", BARE + HF + "--eval_strategy $WHEN --save_strategy steps\n", 0, ""),
    ("launcher-option", BARE + HF + "--save_strategy epoch\n", 0, ""),  # the program may evaluate each epoch by default
    ("launcher-option", BARE + "python x.py --lr --epochs 3\n", 4, "error"),
    ("launcher-option", BARE + "frames_dir=/data\npython x.py --frames_dir --seed 3\n", 5, "error"),
    ("launcher-option", BARE + "frames_dir=/data\npython x.py --frames_dir --seed 3 --at $frames_dir\n", 0, ""),
    ("launcher-option", BARE + "python x.py --lr $LR --resume --auto_batch_size --seed 3\n", 0, ""),
    ("launcher-option", BARE + HF + "--warmup_ratio 3\n", 4, "error"),
    ("launcher-option", BARE + HF + "--warmup_ratio 0.03\npython y.py --warmup_ratio 3\n", 0, ""),
    ("launcher-option", BARE + "vllm serve m --gpu-memory-utilization 95\n", 4, "error"),
    ("launcher-option", BARE + "python -m vllm.entrypoints.openai.api_server --gpu_memory_utilization=90\n", 4, "error"),
    ("launcher-option", BARE + "vllm serve m --gpu-memory-utilization 0.95\npython x.py --gpu-memory-utilization 95\n", 0, ""),
    ("invalid-value", "#!/bin/bash\nexport NCCL_IB_GID_INDEX=mlx5_0\n", 2, "error"),
    ("invalid-value", "#!/bin/bash\nexport NCCL_IB_GID_INDEX=$GID\nexport NCCL_IB_TIMEOUT=22\nexport NCCL_BUFFSIZE=0x400000\n", 0, ""),
    ("invalid-value", "#!/bin/bash\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true\n", 2, "error"),
    ("invalid-value", "#!/bin/bash\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128\n", 0, ""),
    *(("loop-values", BARE + "A=(--lr 1 --bs 4)\n" + use, 5, "error") for use in FIRST_ONLY),
    *(("loop-values", BARE + "A=(--lr 1 --bs 4)\n" + use, 0, "") for use in ALL_ELEMENTS),
    ("loop-values", BARE + "A=()\nA+=(--lr 1)\nsrun python x.py $A\n", 6, "error"),
    ("option-twice", BARE + "python x.py --model_name a/b --lr 1 --model_name /m/c\n", 4, "warning"),
    ("option-twice", BARE + "python x.py --use_fp16 False --seed 1 --use_fp16 True\n", 4, "warning"),
    ("option-twice", BARE + "python x.py --output_dir=/a --output_dir=/b\n", 4, "warning"),
    ("option-twice", BARE + "python x.py --use_fp16 True --use_fp16 true --fold 1 --fold 2 --load_file a --load_file b\n", 0, ""),
    ("option-twice", BARE + "python x.py --output_dir $A --output_dir $B\n", 0, ""),  # they may be equal
    ("missing-colon", BARE + "export LD_LIBRARY_PATH=$LD_LIBRARY_PATH=$HOME/lib\n" + TRAIN, 4, "error"),
    ("missing-colon", BARE + "export PATH=/a/bin:${PATH}=/b/bin\n" + TRAIN, 4, "error"),
    ("missing-colon", BARE + "export PATH=$PATH:/a=b\nsrun --export=PATH=$PATH=1 ls\n" + TRAIN, 0, ""),
    ("not-exported", BARE + "WANDB__SERVICE_WAIT=300\n" + TRAIN, 4, "error"),
    ("not-exported", BARE + "WANDB__SERVICE_WAIT=300\nexport WANDB__SERVICE_WAIT\n" + TRAIN, 0, ""),
]  # fmt: skip
WORDS: list[tuple[str, str, int, str]] = [
    ("mistyped-command", BARE + "module laod cuda\n" + TRAIN, 4, "warning"),
    ("mistyped-command", BARE + "module cuda/11.8\n" + TRAIN, 4, "warning"),
    ("mistyped-command", BARE + "conda actviate x\n" + TRAIN, 4, "warning"),
    ("mistyped-command", ONE + "python -m torchrun --nproc_per_node=4 x.py\n", 7, "warning"),
    ("mistyped-command", ONE + "python -m torch.distributed.lauch --nproc_per_node=4 x.py\n", 7, "warning"),
    ("mistyped-command", ONE + "torch.distributed.launch --nproc_per_node=4 x.py\n", 7, "warning"),
    ("mistyped-command", BARE + "EXPORT A=1\n" + TRAIN, 4, "warning"),
    ("mistyped-command", BARE + "module load a/1\nmodule purge\nmodule -q load b\nmodule use /x/1\nmodule swap a b\nml a/1\n" + TRAIN, 0, ""),
    ("mistyped-command", BARE + "conda info\nconda env list\nconda run -n a ls\npython -m torch.distributed.run x.py\n", 0, ""),
    ("broken-line", BARE + "module load cuda \\\npython train.py\n", 4, "error"),
    ("broken-line", BARE + "module load cuda \\\n  python/3.9\n" + TRAIN, 0, ""),
]  # fmt: skip
NAMES: list[tuple[str, str, int, str]] = [
    ("never-expanded", BARE + "DATA=/x\npython train.py --data DATA\n", 5, "error"),
    ("never-expanded", BARE + "DATA=/x\npython train.py --data={DATA}\n", 5, "error"),
    ("never-expanded", BARE + "DATA=/x\npython train.py --data $ {DATA}\n", 5, "error"),
    ("never-expanded", BARE + "DATA=/x\npython train.py --data $(DATA)\n", 5, "error"),
    ("never-expanded", BARE + "DATA=/x\npython train.py --data $DATA --kind DATA --name {DATA}\n", 0, ""),
    ("never-expanded", BARE + "export MODE=a\npython train.py --env MODE\n", 0, ""),
    ("unset-variable", BARE + "cd $PBS_O_WORKDIR\n" + TRAIN, 4, "warning"),
    ("unset-variable", BARE + "data_dir=/x\npython train.py --data $DATA_DIR\n", 5, "warning"),
    ("unset-variable", BARE + "cd ${PBS_O_WORKDIR:-$PWD}\n" + TRAIN, 0, ""),
    ("unset-variable", "#!/bin/bash\n#PBS -l select=1\ncd $PBS_O_WORKDIR\n" + TRAIN, 0, ""),
    ("unset-variable", BARE + "data_dir=/x\npython train.py --data $data_dir --other $DATA_DIR\n", 0, ""),
    ("unset-variable", BARE + "NUM=2\nNAME=<your_name>\npython train.py --n $num --name $NAME\n", 0, ""),  # a template
    ("test-syntax", BARE + "OMP_NUM_THREADS:4\n" + TRAIN, 4, "error"),
    ("missing-colon", BARE + "export PATH=/x/bin;$PATH\n" + TRAIN, 4, "error"),
    ("missing-colon", BARE + "export PATH=/x/bin:$PATH; ls\n" + TRAIN, 0, ""),
]
FORMS = [
    "--gpus=4:a100",
    "--gpus=a100=4",
    "--gres=gpu4",
    "--gres=gpu:-1",
    "--array=1..10",
    "--nodes=2,",
    "--output=/x/logs/",
]
RIGHT_FORMS = [
    "--gpus=a100:4",
    "--gres=gpu:a100:4",
    "--array=1-10%2",
    "--array=1,5",
    "--nodes=2-4",
    "--output=/x/logs/%j",
]
DIRECTIVES: list[tuple[str, str, int, str]] = [
    *(("directive-refused", f"#!/bin/bash\n#SBATCH {form}\nls\n", 2, "error") for form in FORMS),
    *(("directive-refused", f"#!/bin/bash\n#SBATCH {form}\nls\n", 0, "") for form in RIGHT_FORMS),
]
OPTION_CASES = [*LAUNCH, *SETTINGS, *WORDS, *NAMES, *DIRECTIVES]
