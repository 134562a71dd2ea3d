"""Who am I, which samples, which rate, and are all ranks in step: no framework, numpy inside functions only."""
