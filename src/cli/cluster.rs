//! The cluster that a command speaks to: as `kubectl` finds it, with the words of its refusals.

use crate::api::refit::WeightRefit;
use crate::cli::Failure;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use std::path::PathBuf;

/// Which cluster, and where in it
#[derive(Debug, clap::Args)]
pub(crate) struct Cluster {
    /// Namespace of the refit [default: that of the context]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Credentials [default: $KUBECONFIG, ~/.kube/config, or the pod's own account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// A connection, and the namespace that was meant.
pub(crate) struct Connected {
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

impl Cluster {
    /// Runs `work` against the cluster.
    pub(crate) fn run<T>(
        self,
        work: impl AsyncFnOnce(Connected) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(Failure::failed)?.block_on(async { work(self.connect().await?).await })
    }

    async fn connect(self) -> Result<Connected, Failure> {
        let Self { namespace, context, kubeconfig } = self;
        let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
        let config = match kubeconfig {
            Some(file) => {
                let file = Kubeconfig::read_from(&file).map_err(no_config)?;
                Config::from_custom_kubeconfig(file, &options).await.map_err(no_config)?
            }
            None => match Config::from_kubeconfig(&options).await {
                Ok(config) => config,
                // Inside a pod there is an account in place of a file.
                Err(error) if options.context.is_none() => {
                    Config::incluster().map_err(|_| no_config(error))?
                }
                Err(error) => return Err(no_config(error)),
            },
        };
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| refused(error, "reach the cluster"))?;
        Ok(Connected { client, namespace })
    }
}

fn no_config(error: kube::config::KubeconfigError) -> Failure {
    Failure::refused(
        error,
        "Name a kubeconfig with --kubeconfig or $KUBECONFIG; `kubectl config view` shows it.",
    )
}

impl Connected {
    pub(crate) fn refits(&self) -> Api<WeightRefit> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) async fn refit(&self, name: &str) -> Result<WeightRefit, Failure> {
        self.refits().get(name).await.map_err(|error| refused(error, "read the WeightRefit"))
    }
}

/// What the cluster said no to, with what to do about it.
pub(crate) fn refused(error: kube::Error, action: &str) -> Failure {
    let kube::Error::Api(status) = &error else {
        let mut failure = Failure::failed(error);
        failure.hint = Some(format!("Could not {action}: see whether `kubectl get --raw=/readyz` answers."));
        return failure;
    };
    let hint = match status.code {
        // The API server names the object where the kind is known.
        404 if !status.message.contains("weightrefits.weightrefit.dev") => {
            "The cluster does not know the kind: `weightrefit crd | kubectl apply --server-side -f -`."
                .to_owned()
        }
        404 => "See `weightrefit status -A` for all there are.".to_owned(),
        401 | 403 => format!(
            "Your account may not {action}; ask for the role `weightrefit-view` or `weightrefit-edit`."
        ),
        409 => "Somebody else changed it meanwhile; try again.".to_owned(),
        _ => format!("The API server could not {action}."),
    };
    Failure::refused(status.message.clone(), hint)
}
