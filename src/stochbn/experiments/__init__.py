"""The paper's experiments: data, networks, train, evaluate, report. Stages meet only through files."""
