"""The Secrets of the Helm chart: usable by the services, and their certificates are renewed."""

import json
from base64 import b64decode
from datetime import date, timedelta
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from cryptography import x509
from helm_python.chart import Chart

from quire.api_keys import read_keys
from quire.certificates import SERVICE_NAME

from .test_helm import CHART, of_kind

VALKEY = ("Deployment", "rel-valkey")


def test_secrets_are_usable(tmp_path: Path) -> None:
    """Certificates name services and gateways, and the key file has an operator."""
    secrets = {each["metadata"]["name"]: each["data"] for each in of_kind("Secret", {})}
    tls = {name: b64decode(text) for name, text in secrets["rel-tls"].items()}
    for name, host in (
        ("service", SERVICE_NAME),
        ("service", "rel-valkey"),
        ("gateway", "rel-gateway"),
    ):
        found = x509.load_pem_x509_certificate(tls[f"{name}.crt"])
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert host in names.get_values_for_type(x509.DNSName)
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(tls["ca.crt"]))
    keys = b64decode(secrets["rel-keys"]["keys.json"])
    (tmp_path / "keys.json").write_bytes(keys)
    assert {key.name: key.role for key in read_keys(tmp_path / "keys.json")} == {
        "operator": "operator",
        "user": "user",
    }
    assert len(b64decode(secrets["rel-credentials"]["secret"])) >= 16


def upgraded(chart: Path, old: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The Secrets of an upgrade, and the Deployment of Valkey, where the cluster has the Secrets
    `old`. Without a cluster, Helm looks nothing up."""
    copytree(CHART, chart)
    found = "".join(
        f'{{{{- if eq (index . 1) "{name}" }}}}{json.dumps(secret)}{{{{- end }}}}'
        for name, secret in old.items()
    )
    helpers = chart / "templates" / "_helpers.tpl"
    before = helpers.read_text()
    lookup = '{{ lookup "v1" "Secret" (index . 0).Release.Namespace (index . 1) | toYaml }}'
    assert lookup in before
    helpers.write_text(before.replace(lookup, found))
    files = Chart.load(chart).render({}, name="rel", namespace="ns")
    each = [one for text in files.values() for one in yaml.safe_load_all(text) if one]
    return {
        one["metadata"]["name"]: one
        for one in each
        if one["kind"] == "Secret" or (one["kind"], one["metadata"]["name"]) == VALKEY
    }


@pytest.mark.parametrize(
    ("age_days", "has_ca", "is_renewed"),
    [(0, True, False), (548, True, False), (552, True, True), (552, False, True), (None, 0, False)],
)
def test_certificates_are_renewed_in_their_last_third(
    tmp_path: Path, age_days: int | None, has_ca: bool, is_renewed: bool
) -> None:
    """By the CA that all know, so that nothing else changes; Valkey starts anew. `age_days`: None
    for those of a chart that wrote no day."""
    old = upgraded(tmp_path / "first", {})
    made = None if age_days is None else f"{date.today() - timedelta(age_days)}"
    old["rel-tls"]["metadata"]["annotations"] = {"quire/made": made} if made else {}
    known = {name: old[name] for name in ("rel-tls", "rel-ca")[: 1 + bool(has_ca)]}
    new = upgraded(tmp_path / "second", known)
    data, data_before = new["rel-tls"]["data"], old["rel-tls"]["data"]
    assert "ca.key" not in data
    kept = {name for name in data if data[name] == data_before[name]}
    if not is_renewed:
        assert kept == set(data)
        assert new["rel-tls"]["metadata"]["annotations"]["quire/made"] == (made or "")
        return
    assert kept == ({"ca.crt"} if has_ca else set())
    assert new["rel-tls"]["metadata"]["annotations"]["quire/made"] == f"{date.today()}"
    ca = x509.load_pem_x509_certificate(b64decode(data["ca.crt"]))
    for name in ("service.crt", "gateway.crt"):
        found = x509.load_pem_x509_certificate(b64decode(data[name]))
        found.verify_directly_issued_by(ca)
    pod = new["rel-valkey"]["spec"]["template"]["metadata"]
    assert pod["annotations"] == {"quire/certificates-made": f"{date.today()}"}
