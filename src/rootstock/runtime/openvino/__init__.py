"""Runtime for graphs of models that OpenVINO's exporters wrote."""
