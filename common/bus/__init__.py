"""The bus protocol over Redis: key names, Lua scripts, connections, leases. The only package that imports redis."""
