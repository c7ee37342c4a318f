"""The probes: they run an engine and write down what it says, as capsules. They judge nothing."""
