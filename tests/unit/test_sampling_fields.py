"""A sampling parameter has the same name wherever it is declared: see docs/development.md."""

from dataclasses import fields

from quire import types
from quire.cli.requests.sampling import SamplingFlags
from quire.sampling import NUMBERS
from quire.v1 import sampling_pb2
from services.gateway.http.bodies.schema import GenerationBody
from services.model.config.model_config import GenerationDefaults
from services.protocol.ticket import SamplingParams

ASKED = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def test_what_clients_may_ask_for_has_one_name() -> None:
    assert names(types.Sampling) - {"structured_outputs"} == ASKED - {"structured_output"}
    # Of a beam search, bodies have the fields that vLLM has.
    assert ASKED - {"beam", "structured_output", "logprobs"} <= GenerationBody.model_fields.keys()


def test_workers_read_fields_of_the_message() -> None:
    assert names(SamplingParams) - {"structure"} <= ASKED - {"structured_output"}


def test_every_number_is_a_field_everywhere_with_its_neutral_value() -> None:
    numbers = set(NUMBERS)
    for kind in (types.Sampling, SamplingFlags, SamplingParams):
        assert numbers <= names(kind), kind
    assert numbers <= ASKED & GenerationBody.model_fields.keys()
    assert all(number.accepts(number.neutral) for number in NUMBERS.values())
    assert not any(number.accepts(float("nan")) for number in NUMBERS.values())


def test_defaults_of_a_model_are_sampling_parameters() -> None:
    assert names(GenerationDefaults) - {"max_new_tokens"} <= names(SamplingParams)
