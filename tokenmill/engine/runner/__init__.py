"""Who executes steps: TorchRunner computes, SimulatedRunner answers from a model of time and memory."""
