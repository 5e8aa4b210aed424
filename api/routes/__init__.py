"""The endpoints: each reads a body, asks for something and renders what comes back."""
