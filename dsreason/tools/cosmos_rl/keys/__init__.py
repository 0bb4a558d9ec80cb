"""Tables of all cosmos-rl keys: the kind of value, and the dsreason keys that it becomes or the reason to leave it out."""
