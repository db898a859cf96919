"""The hook of the documentation site (`mkdocs.yml`): renders the reference of the gRPC API from the
definitions in proto/ and their comments, each time that the site is built."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PROTO = Path(__file__).parents[1] / "proto"
PAGE = "reference/grpc.md"
_INTRODUCTION = (
    "Package `quire.v1`. Clients call `Inference`; the other services are for operators and "
    "between Quire's own processes."
)
_SERVICE, _MESSAGE, _ENUM, _METHOD, _FIELD, _VALUE = 6, 4, 5, 2, 2, 2
_NESTED_MESSAGE, _NESTED_ENUM = 3, 4
"""Field numbers of descriptors, of which a comment's path consists."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=grpc_reference()))
    return files


def grpc_reference() -> str:
    """The reference as Markdown: the services, then the messages of each file."""
    lines = ["# gRPC reference", "", _INTRODUCTION, ""]
    for file in _parsed_files():
        lines += _file_section(file)
    return "\n".join(lines) + "\n"


def _parsed_files() -> list[FileDescriptorProto]:
    paths = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    with TemporaryDirectory() as folder:
        output = Path(folder) / "all.bin"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"]
        command += ["--include_source_info", f"--descriptor_set_out={output}", *paths]
        subprocess.run(command, check=True)
        files = FileDescriptorSet.FromString(output.read_bytes()).file
    return sorted(files, key=lambda file: not file.name.endswith("inference.proto"))


def _file_section(file: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
    }
    yield from (f"## {Path(file.name).name}", "")
    for i, service in enumerate(file.service):
        yield from (f"### service {service.name}", "", _text(comments.get((_SERVICE, i))), "")
        yield from ("| method | takes | returns | |", "|---|---|---|---|")
        for j, method in enumerate(service.method):
            takes = "stream of " * method.client_streaming + _link(method.input_type)
            returns = "stream of " * method.server_streaming + _link(method.output_type)
            about = _text(comments.get((_SERVICE, i, _METHOD, j)))
            yield f"| `{method.name}` | {takes} | {returns} | {about} |"
        yield ""
    for i, message in enumerate(file.message_type):
        yield from _message_section(message, (_MESSAGE, i), comments)
    for i, enum in enumerate(file.enum_type):
        yield from _enum_section(enum, (_ENUM, i), comments)


def _message_section(
    message: DescriptorProto, path: tuple[int, ...], comments: dict[tuple[int, ...], str]
) -> Iterator[str]:
    yield from (f"### {message.name}", "", _text(comments.get(path)), "")
    yield from ("| field | type | |", "|---|---|---|") if message.field else ("No fields.",)
    for i, field in enumerate(message.field):
        about = _text(comments.get((*path, _FIELD, i)))
        if field.HasField("oneof_index") and not field.proto3_optional:
            about = f"(one of `{message.oneof_decl[field.oneof_index].name}`) {about}"
        yield f"| `{field.name}` = {field.number} | {_type(field, message)} | {about} |"
    yield ""
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message_section(nested, (*path, _NESTED_MESSAGE, i), comments)
    for i, enum in enumerate(message.enum_type):
        yield from _enum_section(enum, (*path, _NESTED_ENUM, i), comments)


def _enum_section(
    enum: EnumDescriptorProto, path: tuple[int, ...], comments: dict[tuple[int, ...], str]
) -> Iterator[str]:
    yield from (f"### {enum.name}", "", _text(comments.get(path)), "")
    yield from ("| value | |", "|---|---|")
    for i, value in enumerate(enum.value):
        yield f"| `{value.name}` = {value.number} | {_text(comments.get((*path, _VALUE, i)))} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    if entry := entries.get(field.type_name.rpartition(".")[2]):
        key, value = (_type(part, entry) for part in entry.field)
        return f"map of {key} to {value}"
    names = FieldDescriptorProto.Type
    name = _link(field.type_name) if field.type_name else names.Name(field.type)[5:].lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _text(comment: str | None) -> str:
    """A comment as Markdown text: names with underscores as code, no table separators."""
    escaped = (comment or "").replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", r"`\g<0>`", escaped)
