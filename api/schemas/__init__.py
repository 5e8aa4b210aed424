"""The shapes clients send, checked strictly, and their translation into requests for the bus."""
