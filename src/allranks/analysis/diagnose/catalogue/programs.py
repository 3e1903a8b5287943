"""Failures of programs: scripts, paths, SSH launchers, library conflicts, exceptions, misused DDP, FSDP, DeepSpeed."""

from __future__ import annotations

from allranks.analysis.diagnose.patterns import LIKELY, PROGRAM, FailureClass, Pattern, certain, likely, possible

CLASSES: tuple[FailureClass, ...] = (
    FailureClass(
        id="script_not_found",
        title="script, module or project folder is not visible on a node",
        cause="The path exists where the job was submitted but not on the node: it is in the /tmp of one node, on a "
        "file system that is not mounted there, or the name is wrong.",
        fix="Put script and project on a file system that every node sees, or copy them to the nodes (allranks stage "
        "does it, and allranks run does it automatically for /tmp).",
        next_test="srun --ntasks-per-node=1 ls -ld <path> on all nodes of the job",
        reference="https://slurm.schedmd.com/sbcast.html",
        patterns=certain(
            r"can'?t open file .{1,200}(No such file|Errno 2)",
            r"execve\(\).{0,200}No such file|error: (Unable to open|cannot open) (file|script|batch)",
            r"\b(bash|sh|zsh|env|srun|sbatch|exec|mpirun)\b.{0,12}: .{1,160}\.?(sh|py|sbatch|slurm|bash)\S*: No such file or directory",
        )
        + likely(
            r"python[\d.]*: No module named|can'?t find '__main__' module|Error while finding module specification",
            Pattern(r"couldn'?t chdir to|could not (chdir|change (to )?directory)", unless=r"going to \S+ instead"),
            r"\b(bash|sh|zsh|env|line \d+|slurm_script)\b.{0,20}: .{1,160}: No such file or directory",
            r"No such file or directory: '?[^']{0,200}\.(py|sh)\b",
            r"executable file.{0,80} not found|executable .{1,80} not found in \$?PATH|unable to (find|exec\w*) (the )?(executable|program)",
            r"proj(ect)?=missing|pkgs=missing",
            r"Unable to (open|find) .{1,100}\.(py|sh|sbatch)\b",
        )
        + possible(
            Pattern(r"couldn'?t chdir to .{1,300}: going to \S+ instead", passing=True),
            Pattern(
                r"(project|script|workdir|working directory|code|folder).{0,80}(not (visible|found|there|mounted|present|exist)|does not exist|missing)( on)?",
                unless="checkpoint|module named|vscode|error code|exit code",
            ),
        ),
        example="/usr/bin/python3: can't open file '/tmp/train_job.py': [Errno 2] No such file or directory",
    ),
    FailureClass(
        id="ssh_launcher",
        title="the launcher needs SSH, or its remote side failed",
        cause="The launcher starts remote processes by SSH (DeepSpeed's pdsh, mpirun's rsh): the cluster forbids it, "
        "keys or host keys are missing, or the command is missing on the other node.",
        fix="Start with srun and one torchrun per node, which need no SSH (allranks run does); or set up keys, and "
        "install the command on every node.",
        next_test="ssh -o BatchMode=yes <node> true from the first node of the job",
        reference="https://www.deepspeed.ai/getting-started/#launching-deepspeed-training",
        patterns=certain(
            # the exit code of ssh itself is 255; others are those of the remote command
            Pattern(r"pdsh@\S+: ", unless="ssh exited with exit code"),
            r"ssh exited with exit code 255\b",
            r"(Permission denied|Authentication failed).{0,10}\((publickey|password|gssapi|keyboard)",
            r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
            r"ssh: (connect to host|Could not resolve)|(ssh|kex)_exchange_identification",
            r"pdsh.{0,60}(not found|not installed|No such file)|launcher '?pdsh'? (is )?not installed|backend 'pdsh'",
        )
        + likely(
            Pattern(
                r"\bport 22\b.{0,30}(refused|timed out|No route)|connect to host \S+ port \d+", unless="rdzv|master"
            ),
            Pattern(
                r"(ORTE|PRTE|orted|prted|mpirun|mpiexec|hydra).{0,160}(unable to (reliably )?(start|launch)|failed to start|unexpectedly failed|not able to launch|daemon)",
                unless="noticed that",
            ),
            r"SSH keys? (is|are) required|requires? (passwordless )?ssh|passwordless ssh",
            r"Use of .{0,60}SSH keys",
        )
        + possible(r"/etc/ssh/|ssh_askpass|Pseudo-terminal will not be allocated"),
        example="pdsh@login1: node-b: ssh exited with exit code 255",
    ),
    FailureClass(
        id="application_error",
        title="an exception of the program itself",
        cause="The program raised an exception.",
        fix="Look at the last own frame of the traceback: it is the line of the program. Print the values that it uses "
        "there, and compare them with those of a run that works.",
        next_test="run the same command on one rank: if it fails there too, the cause is not distributed training",
        reference="https://docs.pytorch.org/docs/stable/elastic/errors.html",
        patterns=likely(
            Pattern(r"^\S+\.py: error: (unrecognized|the following|argument|invalid)", weight=0.74),
            Pattern(r"^ninja: build stopped|^nvcc fatal|^ptxas fatal|Error building extension '", weight=0.74),
        ),
        example="KeyError: 'labels'",
    ),
    FailureClass(
        id="loss_not_finite",
        emitters=PROGRAM | {"allranks"},
        ends_job=False,
        measured=True,
        title="the loss or the gradient is not finite",
        cause="The loss, or the norm of the gradient, became NaN or infinite, and the program went on: all steps since "
        "then are lost, and so is every checkpoint of them. Gradients are averaged, so all ranks have it after one "
        "step.",
        fix="Go back to a checkpoint before that step; end the program when the loss is not finite; lower the learning "
        "rate, clip gradients, use bfloat16 instead of float16, and check the data of that step.",
        next_test="run the steps before it again with torch.autograd.set_detect_anomaly(True), and print the loss of "
        "each rank before gradients are averaged",
        reference="https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection",
        patterns=likely(
            Pattern(
                r"(?:\b|_)loss(?:_step|_epoch|_\w{1,12}| value)?['\"]?\s{0,3}[:=|]?\s{0,3}['\"]?(?:tensor\()?[-+]?(?:nan|inf(?:inity)?)\b",
                "*loss",
                passing=True,
            ),
            Pattern(
                r"\b(?:grad(?:ient)?s?[ _-]?norm|gnorm|g_norm)(?:_\w{1,12})?['\"]?\s{0,3}[:=|]?\s{0,3}['\"]?(?:tensor\()?[-+]?nan\b",
                passing=True,
            ),
            Pattern(
                r"\bloss\b(?: value)? (?:is|was|became|becomes|has become|went|turned)(?: to)? (?:nan|inf|infinite|infinity|not finite|non-finite|nonfinite)\b"
                r"|\b(?:nan|inf|infinite|non-finite|nonfinite)\b(?: (?:or|and) (?:nan|inf(?:inite)?))?(?: values?)? (?:(?:was |were )?(?:found|detected) )?(?:in )?(?:the )?(?:local |training |total )?(?:forward )?(?:loss|grad(?:ient)?s?)\b",
                passing=True,
                unless=r"\bif\b|\bwhen\b|check(?:ing)? for|\bno nan\b|\bskip|loss[ _]?scal|overflow",
            ),
            Pattern(r'^\{"event": ?"progress".*"loss": ?null', passing=True),
        )
        + possible(
            # with float16, single steps with an infinite norm are skipped
            Pattern(
                r"\b(?:grad(?:ient)?s?[ _-]?norm|gnorm|g_norm)(?:_\w{1,12})?['\"]?\s{0,3}[:=|]?\s{0,3}['\"]?(?:tensor\()?[-+]?inf(?:inity)?\b",
                passing=True,
            )
        ),
        example="iter 120: loss nan, time 20.11ms, mfu 3.04%",
    ),
    FailureClass(
        id="numpy_clash",
        emitters=PROGRAM,
        title="a package was built for another NumPy major version",
        cause="NumPy 2 changed its binary interface and removed names; a package built for or written against NumPy 1 "
        "runs with NumPy 2, or the reverse.",
        fix="Pin numpy<2, or upgrade the package in the message to a version for NumPy 2; the same on every node.",
        next_test="python -c 'import numpy; print(numpy.__version__, numpy.__file__)' on each node, then import the "
        "package that failed",
        reference="https://numpy.org/doc/stable/numpy_2_0_migration_guide.html",
        patterns=certain(
            r"compiled using NumPy 1\.x cannot be run in|compiled (using|with|against) NumPy 1",
            r"numpy\.(dtype|ndarray|ufunc) size changed",
            r"_ARRAY_API not found",
            r"numpy\.core\.multiarray failed to import|numpy\._core\.multiarray failed",
            r"module 'numpy' has no attribute|No module named 'numpy\.(_core|core)|cannot import name .{1,40} from 'numpy",
            r"was removed in the NumPy 2\.0|removed in NumPy 2",
        )
        + likely(
            r"Unable to avoid copy while creating an array",
            r"Numpy is not available",
            r"NumPy 2.{0,80}(incompatible|not support|break|clash|require)|(requires?|needs?) numpy ?<\s?2",
        ),
        example="ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, "
        "got 88 from PyObject",
    ),
    FailureClass(
        id="nccl_library_mismatch",
        title="the loaded NCCL is not the one that torch was built with",
        cause="Another libnccl.so was loaded first (a module, LD_LIBRARY_PATH, a second pip package that overwrote "
        "it), or nodes have different versions.",
        fix="Keep one NCCL: remove the other package or module, unset LD_LIBRARY_PATH, reinstall the version that "
        "torch requires (pip show nvidia-nccl-cu12 or -cu13).",
        next_test="LD_DEBUG=libs python -c 'import torch' 2>&1 | grep nccl shows the file; torch.cuda.nccl.version() "
        "on every node",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        patterns=certain(
            r"undefined symbol: ?_?p?(nccl\w+)",
            r"(mismatch(ed|ing)?|different|incompatible|inconsistent).{0,30}NCCL.{0,20}versions?|NCCL version.{0,40}(mismatch|differ|incompatible|!=)",
            r"libnccl\.so[.\d]*: (version|undefined)",
        )
        + likely(
            r"NCCL.{0,40}(built|compiled) with.{0,60}(but|loaded|found|running|using)",
            r"(libnccl|nvidia-nccl-cu\d+).{0,80}(overwr|conflict|shadow|wrong)",
        ),
        example="ImportError: /opt/env/lib/libtorch_cuda.so: undefined symbol: ncclGroupSimulateEnd",
    ),
    FailureClass(
        id="library_missing",
        title="a library or import is missing",
        cause="A package, a shared library or a name in it is missing: not installed in this environment, another "
        "environment is active on this node, or versions conflict.",
        fix="Activate the same environment on every node (inside the step, not only in the login shell), install the "
        "missing package, or load the module that provides it.",
        next_test="srun --ntasks-per-node=1 python -c 'import <name>; print(<name>.__file__)' on all nodes; allranks "
        "doctor SPEC runs this check",
        reference="https://docs.python.org/3/library/exceptions.html#ModuleNotFoundError",
        patterns=certain(
            r"version `(GLIBC|GLIBCXX|CXXABI|CUDA)\w*[\d.]*' not found",
            r"error while loading shared libraries",
            Pattern(r"\.so[.\d]*: undefined symbol: ", unless=r"undefined symbol: ?_?p?nccl"),
            r"fatal error: \S+\.(h|hpp|cuh): No such file or directory",
            r"built without libuv support|use_libuv was requested",
            r"Distributed package doesn't have \w+ (\W{0,3})?built ?in",
        )
        + likely(
            Pattern(r"ModuleNotFoundError\b", unless=r"numpy\._?core"),
            Pattern(
                r"cannot open shared object file",
                unless="lib[nr]ccl-|NET/Plugin|dlerror|falling back|libibverbs: Warning",
            ),
            Pattern(r"undefined symbol:", unless=r"undefined symbol: ?_?p?nccl"),
            Pattern(r"ImportError\b", unless="nccl|numpy"),
            Pattern(r"cannot import name", unless="from 'numpy"),
            r"^(\S+: )?(line \d+: )?(bash: )?\S+: command not found|command not found",
            Pattern(
                r"(Lmod has detected the following error|module\(s\).{0,60}(unknown|cannot be loaded)|Unable to locate a modulefile)",
                weight=LIKELY - 0.1,  # the script continues, and the software may be available without the module
            ),
            r"CUDA_HOME (environment variable is not set|does not exist)|Ninja is required to load|nvcc.{0,20}not found",
            r"module 'torch\.cpu' has no attribute|AttributeError: module '(torch|transformers|datasets|accelerate|deepspeed|peft)[\w.]*' has no attribute",
        )
        + possible(
            # a program that only prints the message has caught the exception
            Pattern(
                r"No module named ['\"]?\w", unless=r"/python[\d.]*: No module named|^python[\d.]*: |numpy\._?core"
            ),
            r"(unable|failed) to (link|load).{0,60}librar|/ld: cannot find -l|not linked (with|against)",
            Pattern(
                r"(library|package|plugin|libfabric|libcuda\w*) .{0,40}(is )?(not installed|not found|missing|could not be (found|loaded))|DistributionNotFound|PackageNotFoundError",
                unless="NET/|tuner|libnccl-net|Missing ranks|file",
            ),
        ),
        example="ModuleNotFoundError: No module named 'sentencepiece'",
    ),
    FailureClass(
        id="ddp_ready_twice",
        emitters=PROGRAM,
        title="DDP: a parameter was marked ready twice",
        cause="A parameter's gradient hook ran twice in one backward pass: re-entrant gradient checkpointing, often "
        "with LoRA, or a parameter used again outside of forward.",
        fix="Use checkpointing with use_reentrant=False, or static_graph=True if the graph never changes, or disable "
        "checkpointing; do not combine it with find_unused_parameters.",
        next_test="one step without gradient checkpointing: if that works, this is the cause",
        reference="https://docs.pytorch.org/docs/stable/checkpoint.html",
        patterns=certain(r"mark a variable ready only once", r"marked as ready twice|ready twice"),
        example="RuntimeError: Expected to mark a variable ready only once. Parameter at index 71 has been marked as "
        "ready twice.",
    ),
    FailureClass(
        id="ddp_unused_params",
        emitters=PROGRAM,
        title="DDP: parameters without gradient",
        cause="Some parameters were not used in the loss of a step (an expert without tokens, a branch not taken, a "
        "frozen head), so DDP waits for gradients that never arrive.",
        fix="Set find_unused_parameters=True if it changes by step; freeze or remove what is never used; or add every "
        "branch to the loss with weight zero.",
        next_test="TORCH_DISTRIBUTED_DEBUG=DETAIL prints the names of the parameters",
        reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
        patterns=certain(r"Expected to have finished reduction", r"Parameter indices which did not receive grad")
        + likely(
            r"parameters that were not used in (producing|computing) the loss|(did|do|does) not (receive|contribute).{0,20}(grad|loss).{0,40}rank"
        )
        + possible(
            Pattern(r"unused parameters?.{0,60}(error|fail|crash|DDP|reduction)", unless="did not find any unused")
        ),
        example="RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. "
        "Parameter indices which did not receive grad for rank 1: 12 13",
    ),
    FailureClass(
        id="fsdp_mixed_dtype",
        emitters=PROGRAM,
        title="FSDP: tensors of different dtypes in one flat parameter",
        cause="FSDP1 flattens the parameters of a module into one tensor, which has one dtype; here some are float32 "
        "(adapters, norms) and some bfloat16.",
        fix="Convert the model to one dtype before wrapping, or use FSDP2 (fully_shard), which keeps parameters "
        "separate.",
        next_test="print {p.dtype for p in module.parameters()} of each wrapped module",
        reference="https://docs.pytorch.org/docs/stable/fsdp.html",
        patterns=certain(
            r"Must flatten tensors with (uniform|the same) dtype",
            r"(FSDP|flatten|fully_shard|FlatParameter).{0,80}(uniform|same|mixed|different) (original )?(parameter )?dtypes?",
            r"expects? (uniform|all).{0,30}(original )?parameter(s)?.{0,20} dtype",
        ),
        example="ValueError: Must flatten tensors with uniform dtype but got torch.float32 and torch.bfloat16",
    ),
    FailureClass(
        id="dtype_mismatch",
        emitters=PROGRAM,
        title="inputs and weights differ in dtype",
        cause="An operation got two tensors of different dtypes, most often float32 inputs or a float32 module in a "
        "bfloat16 model.",
        fix="Cast the inputs to the model's dtype at its entry, run under autocast, or convert the module that has the "
        "other dtype.",
        next_test="print the dtypes of inputs and weights at the line in the traceback",
        reference="https://docs.pytorch.org/docs/stable/amp.html",
        patterns=certain(
            r"(mat1|m1|self|query).{0,40}(must|to) have the same dtype",
            r"expected (scalar type|dtype|object of (scalar )?type) \S+ (but|for).{0,40}(found|got)?",
            r"Input type .{0,60}(weight|bias) type .{0,60}should be the same",
            r"found (scalar )?(d)?type \w+ but expected",
        )
        + likely(
            Pattern(
                r"(same|matching|match).{0,20}dtypes?\b.{0,60}(bfloat16|BFloat16|float16|Half|Float\b|float32)",
                unless="flatten|FSDP",
            ),
            Pattern(
                r"(dtypes? (mismatch|do not match|differ|don'?t match)|mismatched dtypes?|incompatible dtypes?)",
                unless="flatten|numpy\\.dtype",
            ),
            Pattern(
                r"(source|index).{0,30}destination.{0,20}dtypes? (to )?match|require.{0,40}same dtype", unless="flatten"
            ),
        )
        + possible(r"not implemented for '(BFloat16|Half|Float|Long|Int)'"),
        example="RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float",
    ),
    FailureClass(
        id="deepspeed_batch_mismatch",
        emitters=PROGRAM,
        title="DeepSpeed: batch sizes are not consistent",
        cause="train_batch_size must equal micro-batch x ranks x accumulation; the file was written for another number "
        "of ranks.",
        fix=(
            'Omit one of the three values in the JSON (DeepSpeed computes it), or set "auto" with the HF Trainer; '
            "allranks plan shows the arithmetic."
        ),
        next_test="multiply the three numbers in the message with the actual number of ranks",
        reference="https://www.deepspeed.ai/docs/config-json/",
        patterns=certain(
            r"train_batch_size is not equal to micro_batch",
            r"Check batch related parameters",
            r"(Micro|Train) batch size\b.{0,30}has to be greater than 0|Gradient accumulation steps\b.{0,20}has to be greater than 0",
            r"\bds \w*batch_size\w*=\S+ vs hf",
        )
        + likely(
            r"train_batch_size.{0,80}(mismatch|does not (match|equal)|must (be|equal)|!=)",
            r"batch.?size.{0,60}(not|!=).{0,40}(micro.{0,30}(world|gpus?|ranks?)|gradient_acc)",
        ),
        example="AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu "
        "* gradient_acc_step * world_size 64 != 2 * 4 * 6",
    ),
    FailureClass(
        id="deepspeed_needs_optimizer",
        emitters=PROGRAM,
        title="DeepSpeed: ZeRO without an optimizer",
        cause="ZeRO shards an optimizer's state, but the engine got no optimizer: none in the JSON and none passed, or "
        "model and optimizer were prepared in separate calls.",
        fix="Set the optimizer in the JSON or pass it to deepspeed.initialize; with accelerate, prepare model and "
        "optimizer in one call.",
        next_test="print the configuration that deepspeed.initialize got and check for an optimizer section",
        reference="https://www.deepspeed.ai/docs/config-json/",
        patterns=certain(r"zero[ _]?stage[ _]?\d? ?requires an optimizer")
        + likely(
            r"zero.{0,40}(requires?|needs?|without) (an? )?optimizer",
            r"without (specifying|giving|passing) an? optimizer",
        ),
        example="AssertionError: zero stage 3 requires an optimizer",
    ),
    FailureClass(
        id="extension_build_lock",
        emitters=PROGRAM,
        title="ranks wait for the build of a C++ extension of torch",
        cause="One process builds the extension, the others wait until its lock file is gone. A build that was killed "
        "leaves the file, and every later run waits for ever.",
        fix="If no compiler runs, delete the files named lock below TORCH_EXTENSIONS_DIR (by default "
        "~/.cache/torch_extensions) on every node.",
        next_test=(
            'find "${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}" -name lock -ls; pgrep -a '
            '"ninja|nvcc|c\\+\\+"'
        ),
        reference="https://docs.pytorch.org/docs/stable/cpp_extension.html",
        patterns=certain(r"Waited on lock file .{1,200} for \d+ seconds")
        + likely(r'file_baton\.py", line \d+,? in wait|wait \(torch/utils/file_baton\.py:\d+\)'),
        example=(
            'UserWarning: Waited on lock file "/home/u/.cache/torch_extensions/py311_cu126/fused_adam/lock" for 300 '
            "seconds."
        ),
    ),
)
