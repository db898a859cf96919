"""The parts that every service process uses: settings, logs, metrics, signals, registry."""
