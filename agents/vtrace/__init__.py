"""V-trace actor-critic (IMPALA, Espeholt et al. 2018) on central inference."""

# What this agent lets a gin file bind. Declared here, where no TensorFlow is imported, so that
# actors can tell these names from misspelt ones.
CONFIGURABLES = ("VTraceAgent", "ImpalaDeep", "ImpalaShallow", "GFootball", "MLP", "AutoNetwork")
