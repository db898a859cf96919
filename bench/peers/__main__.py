"""Set the peers up: `python -m bench.peers setup [vllm openvino llama.cpp]`."""

import argparse

from bench.peers import PEERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("setup",))
    parser.add_argument("peers", nargs="*", metavar="PEER", help="default: all of them")
    options = parser.parse_args()
    for name in options.peers or PEERS:
        print(f"{name}: setting up", flush=True)
        PEERS[name].setup()
    print("ready")


if __name__ == "__main__":
    main()
