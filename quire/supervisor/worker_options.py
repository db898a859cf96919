"""The options of `quire serve` that workers get as settings of the same names."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from typer import Option

from quire.choices import Attention, Backend, Dtype, Isa, KvDtype, Numa, Preemption, Quantize
from quire.sizes import duration, memory_size

engine = partial(Option, rich_help_panel="Engine", show_default=False)
network = partial(Option, rich_help_panel="Network", show_default=False)


def _speculative_config(text: str) -> str:
    # Imported here because only this option needs pydantic.
    from quire.speculative_config import check_speculative_config

    return check_speculative_config(text)


@dataclass(frozen=True)
class SharedOptions:
    """The options that workers and gateways get."""

    max_loras: Annotated[
        int | None,
        engine(min=0, metavar="N", help="most LoRA adapters at a time; default: 8"),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        engine(min=1, max=512, metavar="N", help="largest rank of a LoRA adapter; default: 64"),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        network(
            metavar="URL",
            help="collector of traces, OTLP over gRPC, such as http://127.0.0.1:4317; default: no "
            "traces",
        ),
    ] = None


@dataclass(frozen=True)
class WorkerOptions(SharedOptions):
    """The options that prefill and decode workers get."""

    pool_memory: Annotated[
        str | None,
        engine(
            metavar="SIZE",
            parser=memory_size,
            help="the pool's KV memory, such as 2GiB; default: half of what is free after the "
            "weights (1GiB for the demo model)",
        ),
    ] = None
    swap_memory: Annotated[
        str | None,
        engine(
            metavar="SIZE",
            parser=memory_size,
            help="memory beside the pool to which preempted requests are copied; default: none",
        ),
    ] = None
    preemption: Annotated[
        Preemption | None,
        engine(help="how requests are preempted; default: auto, swap if that costs less"),
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        engine(
            min=1,
            max=8,
            metavar="N",
            help="processes of each worker, which divide the model: 1, 2, 4 or 8; default: 1",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        engine(min=1, max=1024, metavar="TOKENS", help="positions of a block; default: 16"),
    ] = None
    dtype: Annotated[
        Dtype | None,
        engine(help="weights and activations; default: auto, by the model and the processor"),
    ] = None
    device: Annotated[
        str | None,
        engine(
            metavar="DEVICE",
            help="cpu, or a GPU: cuda:0, the first one of several ranks; default: cpu",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        engine(
            min=0.01,
            max=1.0,
            metavar="SHARE",
            help="share of the GPU's memory for the pool and all workers; default: 0.9",
        ),
    ] = None
    backend: Annotated[
        Backend | None,
        engine(help="kernels; default: auto, cpu, or triton on a GPU"),
    ] = None
    attention: Annotated[
        Attention | None,
        engine(
            help="attention beside the triton kernels; default: auto, by the GPU and what is "
            "installed"
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        engine(help="launch each kernel of a decode step instead of replaying CUDA graphs"),
    ] = None
    isa: Annotated[
        Isa | None,
        engine(
            help="instruction set of the CPU kernels; default: auto, the fastest one here, "
            "measured if in doubt"
        ),
    ] = None
    quantize: Annotated[
        Quantize | None,
        engine(
            help="run linears with 8-bit or 4-bit weights (groups of 64, 32 or 128 inputs) and "
            "8-bit activations; none: quantized files too are served in --dtype; default: auto, "
            "as the files are"
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype | None,
        engine(help="keys and values; default: auto, as --dtype; int8: half of bfloat16's memory"),
    ] = None
    cpus: Annotated[
        str | None,
        engine(
            metavar="LIST",
            help="CPUs that the workers share, such as 0-3,6; default: auto, one of each core",
        ),
    ] = None
    threads: Annotated[
        int | None,
        engine(min=1, metavar="N", help="threads of each worker, on any CPU; excludes --cpus"),
    ] = None
    numa: Annotated[
        Numa | None,
        engine(
            help="auto: on a host with several NUMA nodes, threads and memory of a worker are on "
            "nodes of its own; off: all CPUs are one node; default: auto"
        ),
    ] = None
    max_gap_ms: Annotated[
        float | None,
        engine(
            parser=duration,
            metavar="MS",
            help="the inter-token latency up to which prompts may use the CPUs of decode workers "
            "too; 0: never; default: 100",
        ),
    ] = None
    weights_cache: Annotated[
        str | None,
        engine(metavar="DIR", help="directory of packed weights, or none; default: ~/.cache/quire"),
    ] = None
    max_model_len: Annotated[
        int | None,
        engine(
            min=2,
            metavar="TOKENS",
            help="longest prompt + generation; default: the model's context",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        engine(min=1, metavar="N", help="sequences of one decode worker; default: 64"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, engine(min=1, metavar="N", help="tokens of one step")
    ] = None
    speculative_config: Annotated[
        str | None,
        engine(
            metavar="JSON",
            parser=_speculative_config,
            help="speculative decoding, such as "
            """'{"method": "ngram", "num_speculative_tokens": 5}', or with a draft model: """
            """'{"model": "DIR|FILE|ID", "num_speculative_tokens": 5}'; default: none""",
        ),
    ] = None
