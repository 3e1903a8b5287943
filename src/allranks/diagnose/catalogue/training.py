"""Rules of DDP, FSDP and DeepSpeed that a program broke."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import FITS, SHOWS, Entry, Pattern

DDP_READY_TWICE = Entry(
    id="ddp_ready_twice",
    title="DDP: a parameter was marked ready twice",
    cause=(
        "A parameter's gradient hook ran twice in one backward pass: re-entrant gradient checkpointing, often with LoRA, or a parameter used again outside "
        "of forward."
    ),
    fix="Checkpoint with use_reentrant=False, or static_graph=True where the graph never changes, or switch checkpointing off; no find_unused_parameters with it.",
    next_test="one step without gradient checkpointing: if that works, this is the cause",
    reference="https://docs.pytorch.org/docs/stable/checkpoint.html",
    patterns=(
        Pattern(r"mark a variable ready only once"),
        Pattern(r"marked as ready twice|ready twice", "ready twice"),
    ),
    example="RuntimeError: Expected to mark a variable ready only once. Parameter at index 71 has been marked as ready twice.",
    near_miss="INFO both ranks marked ready",
)

DDP_UNUSED_PARAMS = Entry(
    id="ddp_unused_params",
    title="DDP: parameters without gradient",
    cause="Some parameters took no part in the loss of a step (an expert no token chose, a branch not taken, a frozen head), so DDP waits for gradients that never come.",
    fix="find_unused_parameters=True if it changes by step; freeze or remove what is never used; let every branch take part with a zero weight.",
    next_test="TORCH_DISTRIBUTED_DEBUG=DETAIL prints the names of the parameters",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    patterns=(
        Pattern(r"Expected to have finished reduction"),
        Pattern(r"Parameter indices which did not receive grad"),
        Pattern(
            r"parameters that were not used in (producing|computing) the loss|(did|do|does) not (receive|contribute).{0,20}(grad|loss).{0,40}rank",
            "not used in ",
            "not receive",
            "not contribute",
            weight=SHOWS,
        ),
        Pattern(
            r"unused parameters?.{0,60}(error|fail|crash|DDP|reduction)",
            "unused parameter",
            weight=FITS,
            unless="did not find any unused",
        ),
    ),
    example="RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. Parameter indices which did not receive grad for rank 1: 12 13",
    near_miss="Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass.",
)

FSDP_MIXED_DTYPE = Entry(
    id="fsdp_mixed_dtype",
    title="FSDP: tensors of different dtypes in one flat parameter",
    cause="FSDP flattens the parameters of a module into one tensor, which has one dtype; here some are float32 (adapters, norms) and some bfloat16.",
    fix="Convert the model to one dtype before wrapping, or use FSDP2 (fully_shard), which keeps parameters apart.",
    next_test="print {p.dtype for p in module.parameters()} of each wrapped module",
    reference="https://docs.pytorch.org/docs/stable/fsdp.html",
    patterns=(
        Pattern(r"Must flatten tensors with (uniform|the same) dtype", "must flatten tensors"),
        Pattern(
            r"(FSDP|flatten|fully_shard|FlatParameter).{0,80}(uniform|same|mixed|different) (original )?(parameter )?dtypes?",
            "fsdp",
            "flatten",
            "fully_shard",
            "flatparam",
        ),
        Pattern(r"expects? (uniform|all).{0,30}(original )?parameter(s)?.{0,20} dtype", " dtype"),
    ),
    example="ValueError: Must flatten tensors with uniform dtype but got torch.float32 and torch.bfloat16",
    near_miss="INFO FSDP parameters kept in torch.bfloat16",
)

DTYPE_MISMATCH = Entry(
    id="dtype_mismatch",
    title="inputs and weights differ in dtype",
    cause="An operation got two tensors of different dtypes, most often float32 inputs or a float32 module within a bfloat16 model.",
    fix="Cast the inputs to the model's dtype where they enter, run under autocast, or convert the module that stayed in the other dtype.",
    next_test="print the dtypes of inputs and weights at the line that the traceback names",
    reference="https://docs.pytorch.org/docs/stable/amp.html",
    patterns=(
        Pattern(r"(mat1|m1|self|query).{0,40}(must|to) have the same dtype", " have the same dtype"),
        Pattern(
            r"expected (scalar type|dtype|object of (scalar )?type) \S+ (but|for).{0,40}(found|got)?",
            "expected scalar type",
            "expected dtype",
            "expected object of",
        ),
        Pattern(r"Input type .{0,60}(weight|bias) type .{0,60}should be the same", "should be the same"),
        Pattern(r"found (scalar )?(d)?type \w+ but expected", "but expected"),
        Pattern(
            r"(same|matching|match).{0,20}dtypes?\b.{0,60}(bfloat16|BFloat16|float16|Half|Float\b|float32)",
            "dtype",
            weight=SHOWS,
            unless="flatten|FSDP",
        ),
        Pattern(
            r"(dtypes? (mismatch|do not match|differ|don'?t match)|mismatched dtypes?|incompatible dtypes?)",
            "dtype",
            weight=SHOWS,
            unless="flatten|numpy\\.dtype",
        ),
        Pattern(r"not implemented for '(BFloat16|Half|Float|Long|Int)'", "not implemented for ", weight=FITS),
        Pattern(
            r"(source|index).{0,30}destination.{0,20}dtypes? (to )?match|require.{0,40}same dtype",
            "dtype",
            weight=SHOWS,
            unless="flatten",
        ),
    ),
    example="RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float",
    near_miss="INFO all tensors are of dtype bfloat16",
)

DEEPSPEED_BATCH = Entry(
    id="deepspeed_batch_mismatch",
    title="DeepSpeed: batch sizes do not multiply out",
    cause="train_batch_size must be micro-batch x ranks x accumulation; with another number of ranks than the file was written for it is not.",
    fix='Leave one of the three out of the JSON (DeepSpeed fills it in), or set "auto" with the HF Trainer; allranks plan does the arithmetic.',
    next_test="multiply the three numbers of the message by hand with the real number of ranks",
    reference="https://www.deepspeed.ai/docs/config-json/",
    patterns=(
        Pattern(r"train_batch_size is not equal to micro_batch"),
        Pattern(r"Check batch related parameters"),
        Pattern(r"\bds \w*batch_size\w*=\S+ vs hf", " vs hf"),
        Pattern(
            r"train_batch_size.{0,80}(mismatch|does not (match|equal)|must (be|equal)|!=)",
            "train_batch_size",
            weight=SHOWS,
        ),
        Pattern(
            r"batch.?size.{0,60}(not|!=).{0,40}(micro.{0,30}(world|gpus?|ranks?)|gradient_acc)", "batch", weight=SHOWS
        ),
    ),
    example="AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 64 != 2 * 4 * 6",
    near_miss="INFO train_batch_size 64 = 2 * 4 * 8",
)

DEEPSPEED_NEEDS_OPTIMIZER = Entry(
    id="deepspeed_needs_optimizer",
    title="DeepSpeed: ZeRO without an optimizer",
    cause="ZeRO shards an optimizer's state, and the engine was given none: no optimizer in the JSON and none passed, or model and optimizer prepared in separate calls.",
    fix="Give the optimizer in the JSON or to deepspeed.initialize; with accelerate, prepare model and optimizer in one call.",
    next_test="print the configuration that deepspeed.initialize got: is there an optimizer section?",
    reference="https://www.deepspeed.ai/docs/config-json/",
    patterns=(
        Pattern(r"zero[ _]?stage[ _]?\d? ?requires an optimizer", "requires an optimizer"),
        Pattern(r"zero.{0,40}(requires?|needs?|without) (an? )?optimizer", "zero", weight=SHOWS),
        Pattern(r"without (specifying|giving|passing) an? optimizer", " an optimizer", " a optimizer", weight=SHOWS),
    ),
    example="AssertionError: zero stage 3 requires an optimizer",
    near_miss="INFO ZeRO stage 3 with optimizer AdamW",
)
