"""Words all rooms share: settings, errors, messages, the bus. Never imports torch, transformers, fastapi."""
