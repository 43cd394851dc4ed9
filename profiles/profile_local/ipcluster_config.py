"""One MPI world on this machine: started by labkit.start(), `labkit up` or JupyterLab's cluster tab."""

c = get_config()  # noqa: F821  (ipyparallel defines it)

c.Cluster.controller_launcher_class = "labkit"
c.Cluster.engine_launcher_class = "labkit"
# The ranks load while the controller does, and find its address in the profile's folder.
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False
