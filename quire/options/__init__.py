"""The options of workers and gateways; each is declared here once.

A field of these classes is a setting of the service (`services.*.config` inherits them), a flag of
`quire serve` (`quire.supervisor.options` makes it), and a row of docs/operations/settings.md
(`tools/settings_page.py` writes it)."""
