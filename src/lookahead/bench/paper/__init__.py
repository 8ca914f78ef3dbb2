"""The paper's tables and figures as presets, each beside the paper's numbers."""
