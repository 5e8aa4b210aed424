"""What tests share: real servers and real processes, never stand-ins for them."""
