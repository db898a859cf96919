"""The right to call the gateway, and its limits: API keys, their tenants, roles and limits."""
