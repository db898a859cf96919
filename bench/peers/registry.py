"""Which peers there are."""

from bench.peers.llamacpp import LlamaCpp
from bench.peers.openvino import OpenVino
from bench.peers.peer import Peer
from bench.peers.vllm import Vllm

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Vllm(),
        # the same with short chunks: slower alone, but decoding streams wait less for a prompt
        Vllm(name="vllm-256", chunk=256),
        OpenVino(),
        # fewer scales than with its default, 32: faster, and less exact
        OpenVino("openvino-128", 128, ("int8", "int4")),
        LlamaCpp(),
        LlamaCpp("llama.cpp-k", {"int4": "Q4_K_M"}),
    )
}
