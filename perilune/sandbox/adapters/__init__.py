"""Sandboxes as other frameworks want them. Each module needs its framework, and nothing else imports it:

adapters.swerex: a runtime and a deployment of SWE-ReX. adapters.harbor: an environment of Harbor.
"""
