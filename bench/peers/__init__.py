"""The engines that Quire is measured against, each in a virtual environment of its own."""

from bench.peers.llamacpp import LlamaCpp
from bench.peers.openvino import OpenVino
from bench.peers.peer import Peer
from bench.peers.vllm import Vllm

OPENVINO = OpenVino(), OpenVino("openvino-16", activation_group=0)
PEERS: dict[str, Peer] = {peer.name: peer for peer in (Vllm(), *OPENVINO, LlamaCpp())}
