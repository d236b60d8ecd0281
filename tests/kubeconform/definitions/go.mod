module weightrefit/tests/kubeconform/definitions

go 1.26.0

// Read for its CustomResourceDefinitions; nothing of it is compiled.
require github.com/prometheus-operator/prometheus-operator v0.85.0
