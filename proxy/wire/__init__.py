"""The formats of the data that engines, clients and the gateway exchange. No IO."""
