"""Who may call the gateway, and how much: API keys, their tenants, roles and limits."""
