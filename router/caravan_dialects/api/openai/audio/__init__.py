"""``/v1/audio``: writes down what a sound says."""
