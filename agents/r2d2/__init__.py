"""R2D2: recurrent Q-learning from prioritised replay (Kapturowski et al. 2019)."""

# What this agent lets a gin file bind. Declared here, where no TensorFlow is imported, so that
# actors can tell these names from misspelt ones.
CONFIGURABLES = ("R2D2Agent", "DuelingLSTMDQNNet", "DuelingLSTMDQNMLP", "DuelingLSTMDQNAuto")
