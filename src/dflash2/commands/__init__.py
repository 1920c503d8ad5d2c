"""The commands of `dflash2`, one module per room: thin, each calls the library and prints what it returns."""
