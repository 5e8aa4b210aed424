"""The bus protocol over Redis: keys, Lua scripts, connections, leases. Nothing else imports redis."""
