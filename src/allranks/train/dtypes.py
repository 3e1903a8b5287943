"""The dtypes that files may hold, by the names that the safetensors format has for them."""

from __future__ import annotations

import torch

OF_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in OF_NAME.items()}
