"""The compiled build: the modules that a request runs through, compiled by mypyc.

backend    what pip and `python -m build` call: setuptools, which also compiles if PDPROXY_COMPILE is set
  build      compile the package in a directory, twice: training counts branches for the second time
  classes    the changes to classes that mypyc needs, see DESIGN.md
  modules    the list of compiled modules
  training   the load during which branches are counted
  pump       the extension module in C
"""
