"""The ways in which a worker quantizes the weights of the linears."""

from typing import Literal

Quantization = Literal["int8", "int4", "int4-32", "int4-128"]
"""int8: a scale for each output. int4: a scale and a zero point for each group of inputs; the
number is the size of a group, 64 by default; the head is int8. Activations are int8 in both."""
