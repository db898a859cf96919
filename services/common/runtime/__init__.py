"""What every service process needs: settings, logs, metrics, signals, registry."""
