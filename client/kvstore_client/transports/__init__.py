"""How block payloads get to this process and back."""
