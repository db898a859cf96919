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
        LlamaCpp(),
    )
}
