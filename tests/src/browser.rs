//! A headless Chromium that looks at the console as a person would.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use chromiumoxide::browser::{Browser, BrowserConfig};
use chromiumoxide::cdp::browser_protocol::accessibility::{AxNode, GetFullAxTreeParams};
use chromiumoxide::cdp::browser_protocol::emulation::{
    MediaFeature, SetDeviceMetricsOverrideParams, SetEmulatedMediaParams, SetFocusEmulationEnabledParams,
};
use chromiumoxide::cdp::browser_protocol::input::{DispatchKeyEventParams, DispatchKeyEventType};
use chromiumoxide::cdp::browser_protocol::log::{EnableParams as EnableLog, EventEntryAdded, LogEntryLevel};
use chromiumoxide::cdp::browser_protocol::page::CaptureScreenshotFormat;
use chromiumoxide::cdp::js_protocol::runtime::{ConsoleApiCalledType, EventConsoleApiCalled, EventExceptionThrown};
use chromiumoxide::page::{Page, ScreenshotParams};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use xtask::tools;

/// How long the browser has to end in order.
const END: Duration = Duration::from_secs(5);

/// A screen and what its owner prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Width in CSS pixels.
    pub width: u32,
    /// Height in CSS pixels.
    pub height: u32,
    /// Whether it is a phone's.
    pub phone: bool,
    /// Whether dark colours are preferred.
    pub dark: bool,
}

impl Screen {
    /// A laptop's.
    pub const DESKTOP: Self = Self { width: 1280, height: 900, phone: false, dark: false };
    /// A phone's.
    pub const PHONE: Self = Self { width: 390, height: 844, phone: true, dark: false };

    /// The same with dark colours.
    #[must_use]
    pub fn dark(self) -> Self {
        Self { dark: true, ..self }
    }
}

/// A key that does something in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// To the next element.
    Tab,
    /// To the moment before.
    Left,
}

impl Key {
    /// Its name in `KeyboardEvent`, and Windows' code for it, which is what Chromium goes by.
    fn name_and_code(self) -> (&'static str, i64) {
        match self {
            Self::Tab => ("Tab", 9),
            Self::Left => ("ArrowLeft", 37),
        }
    }
}

/// A browser with one page. It ends when it is dropped, which needs a runtime with several threads.
#[derive(Debug)]
pub struct Visitor {
    page: Page,
    complaints: Arc<Mutex<Vec<String>>>,
    tasks: Vec<JoinHandle<()>>,
    browser: Browser,
    // Removed last, when nothing writes to it any more.
    _profile: TempDir,
}

impl Visitor {
    /// Starts a browser with a profile of its own.
    ///
    /// # Errors
    /// If there is no Chromium and none can be installed, or it does not start.
    pub async fn start(screen: Screen) -> Result<Self> {
        let program = tools::chromium()?;
        let profile = tempfile::Builder::new().prefix("homing-browser-").tempdir()?;
        let config = BrowserConfig::builder()
            .chrome_executable(program)
            .new_headless_mode()
            .user_data_dir(profile.path())
            // Its sandbox does not work for root and in containers, and only this project's own page is opened.
            .no_sandbox()
            .args(["disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"])
            .build()
            .map_err(|error| anyhow!("the browser's configuration: {error}"))?;
        let (browser, mut handler) = Browser::launch(config).await.context("starting Chromium")?;
        let mut tasks = vec![tokio::spawn(async move { while handler.next().await.is_some() {} })];
        let page = browser.new_page("about:blank").await.context("opening a page")?;
        // Keys go to the page only while it has the focus, which a window that nobody sees does not get by itself.
        page.bring_to_front().await?;
        page.execute(SetFocusEmulationEnabledParams::new(true)).await?;
        let complaints = Arc::default();
        tasks.extend(listen(&page, &complaints).await?);
        let visitor = Self { page, complaints, tasks, browser, _profile: profile };
        visitor.set_screen(screen).await?;
        Ok(visitor)
    }

    /// Changes the screen.
    ///
    /// # Errors
    /// If the browser refuses.
    pub async fn set_screen(&self, screen: Screen) -> Result<()> {
        let Screen { width, height, phone, dark } = screen;
        self.page.execute(SetDeviceMetricsOverrideParams::new(width, height, if phone { 2.0 } else { 1.0 }, phone)).await?;
        let scheme = MediaFeature::new("prefers-color-scheme", if dark { "dark" } else { "light" });
        self.page.execute(SetEmulatedMediaParams::builder().feature(scheme).build()).await?;
        Ok(())
    }

    /// Opens an address and waits until it is loaded.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub async fn open(&self, url: &str) -> Result<()> {
        self.page.goto(url).await.with_context(|| format!("opening {url}"))?;
        Ok(())
    }

    /// What an expression is in the page.
    ///
    /// # Errors
    /// If it throws, or is of another type.
    pub async fn ask<T: DeserializeOwned>(&self, expression: &str) -> Result<T> {
        let answer = self.page.evaluate(expression).await.with_context(|| format!("evaluating {expression}"))?;
        answer.into_value().with_context(|| format!("the value of {expression}"))
    }

    /// Presses a key and lets it go.
    ///
    /// # Errors
    /// If the browser refuses.
    pub async fn press(&self, key: Key) -> Result<()> {
        let (name, code) = key.name_and_code();
        for kind in [DispatchKeyEventType::RawKeyDown, DispatchKeyEventType::KeyUp] {
            let event = DispatchKeyEventParams::builder().r#type(kind).key(name).code(name).windows_virtual_key_code(code);
            self.page.execute(event.build().map_err(|error| anyhow!(error))?).await?;
        }
        Ok(())
    }

    /// The accessibility tree, as a screen reader gets it.
    ///
    /// # Errors
    /// If the browser refuses.
    pub async fn accessibility(&self) -> Result<Vec<AxNode>> {
        Ok(self.page.execute(GetFullAxTreeParams::default()).await?.result.nodes)
    }

    /// A picture of the whole page, PNG.
    ///
    /// # Errors
    /// If the browser refuses.
    pub async fn picture(&self) -> Result<Vec<u8>> {
        let params = ScreenshotParams::builder().format(CaptureScreenshotFormat::Png).full_page(true).build();
        Ok(self.page.screenshot(params).await?)
    }

    /// Errors and warnings the page has caused so far.
    pub fn complaints(&self) -> Vec<String> {
        self.complaints.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Visitor {
    /// Ends the browser in order and waits for it: killed, it would leave processes behind that still write to the profile.
    fn drop(&mut self) {
        let ended = async {
            let _ = self.browser.close().await;
            let _ = self.browser.wait().await;
        };
        tokio::task::block_in_place(|| {
            let runtime = tokio::runtime::Handle::current();
            // One that does not end in time is killed with its handle.
            let _ = runtime.block_on(async { tokio::time::timeout(END, ended).await });
        });
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Keeps what goes wrong in the page.
async fn listen(page: &Page, complaints: &Arc<Mutex<Vec<String>>>) -> Result<[JoinHandle<()>; 3]> {
    let keep = |complaints: &Arc<Mutex<Vec<String>>>, text: String| {
        complaints.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    };
    page.execute(EnableLog::default()).await?;
    let mut calls = page.event_listener::<EventConsoleApiCalled>().await?;
    let mut exceptions = page.event_listener::<EventExceptionThrown>().await?;
    let mut entries = page.event_listener::<EventEntryAdded>().await?;
    let all = [(); 3].map(|()| Arc::clone(complaints));
    let [one, two, three] = all;
    Ok([
        tokio::spawn(async move {
            while let Some(call) = calls.next().await {
                if matches!(call.r#type, ConsoleApiCalledType::Error | ConsoleApiCalledType::Warning) {
                    keep(&one, format!("console: {:?}", call.args));
                }
            }
        }),
        tokio::spawn(async move {
            while let Some(thrown) = exceptions.next().await {
                keep(&two, format!("exception: {:?}", thrown.exception_details));
            }
        }),
        tokio::spawn(async move {
            while let Some(added) = entries.next().await {
                if matches!(added.entry.level, LogEntryLevel::Error | LogEntryLevel::Warning) {
                    keep(&three, format!("log: {} {}", added.entry.text, added.entry.url.clone().unwrap_or_default()));
                }
            }
        }),
    ])
}
