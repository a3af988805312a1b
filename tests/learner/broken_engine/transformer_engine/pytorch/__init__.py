raise OSError("transformer_engine_torch.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE")
