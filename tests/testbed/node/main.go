// Command node is what a node and its control plane need beside etcd and the API server, in one binary, as they share
// most of what they link: it becomes the one under whose name it was started.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	var command *cobra.Command
	switch name := filepath.Base(os.Args[0]); name {
	case "coredns":
		coremain.Run()
		return
	case "kube-controller-manager":
		command = controllers.NewControllerManagerCommand()
	case "kube-proxy":
		command = proxy.NewProxyCommand()
	case "kube-scheduler":
		command = scheduler.NewSchedulerCommand()
	case "kubelet":
		command = kubelet.NewKubeletCommand(context.Background())
	default:
		fmt.Fprintf(os.Stderr, "%s is not a program of this binary\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
