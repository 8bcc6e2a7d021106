"""How far one network and its statistics get beyond the paper."""
