def describe(*a): pass
