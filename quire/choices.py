"""The options that are one of several words: flags of the command line, and settings of services.

Each is declared here once, for `quire serve`, the services, and the other commands that have it.
"""

from typing import Literal

Dtype = Literal["auto", "bfloat16", "float32"]
KvDtype = Literal["auto", "int8", "fp8"]
Quantize = Literal["auto", "none", "int8", "int4", "int4-32", "int4-128"]
Backend = Literal["auto", "cpu", "reference", "triton"]
Attention = Literal["auto", "flashinfer", "flash", "triton", "reference"]
Isa = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"]
Numa = Literal["auto", "off"]
Preemption = Literal["auto", "swap", "recompute"]

ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "phi4_mini_json", "openai"
]
ReasoningParser = Literal["auto", "none", "think", "mistral"]
