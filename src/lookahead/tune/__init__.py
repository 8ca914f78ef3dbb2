"""Which config suits a model on a machine: what a step costs there, how much is accepted, and what follows."""
