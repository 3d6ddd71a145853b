"""scripts/differential: compare the requests that engines get from pdproxy and from other proxies.

requests     requests of clients, in many spellings
  protocols    rules and answers of each protocol, and engines that record every request
  pairs        a program and the connector that it is compared with
  differences  differences between two records of the same requests, and the accepted ones with reasons
"""
