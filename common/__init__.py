"""Words every room shares: settings, errors, messages, and the bus. Never imports torch, transformers or fastapi."""
