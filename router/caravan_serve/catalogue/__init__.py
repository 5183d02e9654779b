"""The models that `caravan serve` loads and unloads as requests ask for them."""
