"""The parity lab: does the graph change what the model sees?

metrics    distance of two outputs, noise floor, fingerprints
tape       what passes through the manager and the blocks during a call
scenarios  the conditions that break graphs, by name
diagnose   from a taped call to findings that name a suspect
bisect     the first module where two arms part
faults     planted faults, and whether the lab catches them
lab        all of it on one session
"""
