"""Commands of the pipeline and the experiments, which need a checkout: no wheel has them."""
