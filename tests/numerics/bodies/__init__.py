"""Functions that every rank executes, named by the tests as ``module:function``."""
